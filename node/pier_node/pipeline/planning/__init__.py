"""The path planner: which site holds which stage, and the path of every microbatch (SkipPipe, arXiv 2502.19913).

Pure functions without files or network. `problem` defines what is planned and `plan` the result, and whether it is
valid. `simulator` computes how long a plan takes, `bounds` gives lower bounds on its time, `search` finds one with the
changes in `moves`, and `policies` compares it with a full pipeline.
"""
