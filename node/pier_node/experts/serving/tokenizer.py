"""The tokenizer in a model's folder: what a text begins with, what ends it, and how a chat is written.

tokenizer.json has the tokens. tokenizer_config.json, or chat_template.jinja, has the chat template, which is rendered
as transformers does it. A text ends with a token that generation_config.json, config.json or tokenizer_config.json
names, or that well-known tokenizers use.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pier_node.base.errors import PierError
from pier_node.experts.serving.request import Chat, Refusal
from pier_node.trainer.data.tokens import FileTokenizer


class ModelTokenizer(FileTokenizer):
    """A tokenizer with the special tokens and the chat template of its model.

    Args:
        folder: of the model.
        begin: begin each prompt as the tokenizer says, for example with the token <s>. Pier's own trainer never does.

    Attributes:
        ends: the tokens that end a text.
    """

    def __init__(self, folder: Path, begin: bool = False) -> None:
        if not (folder / "tokenizer.json").exists():
            raise PierError(
                f"{folder} has no tokenizer.json",
                "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        super().__init__(folder / "tokenizer.json")
        self._begin = begin
        about = _read(folder / "tokenizer_config.json")
        self._special = {key: _text(value) for key, value in about.items() if key.endswith("_token")}
        self._template = _template(folder, about)
        named = [_read(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        end = self._special.get("eos_token")
        own = [self._library.token_to_id(end)] if isinstance(end, str) else []
        ids = [id for each in [*named, own] for id in (each if isinstance(each, list) else [each])]
        self.ends = {id for id in ids if isinstance(id, int)} or {self.separator} - {None}

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return list(self._library.encode(text, add_special_tokens=self._begin).ids)

    def chat(self, messages: Chat) -> list[int]:
        """The tokens of a chat, up to where the answer begins. Raises Refusal: the template does not allow it."""
        if not self._template:
            problem = (
                "this model has no chat template; ask at /v1/completions, or add chat_template.jinja to its folder"
            )
            raise Refusal(400, problem, "no_chat_template")
        try:
            text = (
                _environment()
                .from_string(self._template)
                .render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special)
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise Refusal(400, f"messages: the chat template refuses them: {error}", None, "messages") from error
        return list(self._library.encode(text, add_special_tokens=False).ids)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates may use: the same as in transformers."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    made.filters["tojson"] = _to_json
    made.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return made


class _Generation(Extension):
    """{% generation %} marks what a model is trained to say; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _template(folder: Path, about: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = about.get("chat_template") or ""
    if isinstance(found, list):  # several, by name
        found = {each.get("name"): each.get("template") for each in found}.get("default") or ""
    return str(found)


def _text(token: Any) -> str | None:
    """A special token: its text, alone or with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. Raises PierError."""
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PierError(f"{file}: not a JSON object: {error}", "Copy the model's folder again.") from error
