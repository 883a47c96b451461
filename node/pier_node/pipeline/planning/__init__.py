"""The path planner: which site holds which stage, and the path of every microbatch (SkipPipe, arXiv 2502.19913).

Pure functions without files or network. `problem` defines what is planned and `plan` the result. `check` decides
whether a plan is valid, `simulate` computes how long it takes, `bounds` gives lower bounds on its time, and `search`
finds it.
"""
