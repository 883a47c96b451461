"""An ensemble behind the completions protocol, over HTTP, with a page to type into (spec/hdee.md sections 2.6, 3.4)."""
