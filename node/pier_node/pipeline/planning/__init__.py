"""SkipPipe paths: which site holds which stage, and which way every microbatch takes (arXiv 2502.19913).

Pure functions: no files, no network. `problem` says what is planned, `plan` what came out, `check` whether it is
allowed, `simulate` how long it takes, `bounds` how short it could be at best, `search` finds it.
"""
