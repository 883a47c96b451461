"""The one exception that people see: it says what is wrong, where, and what to do next."""


class PierError(Exception):
    """An error with a remedy; the command line prints it without a traceback.

    Args:
        problem: what is wrong and where, in one sentence.
        remedy: what to do next; may be empty if the problem already says it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}\n{remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy
