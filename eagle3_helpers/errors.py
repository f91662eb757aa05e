"""The refusals of the runbook: what happened, which value, what to do next, and the exit code.

A refusal is a sentence for the person at the machine. A traceback reaches a user only for a defect of ours.
"""


class Refusal(Exception):
    """A stop with a reason.

    `what` says what happened and names the value; `remedy` says what to do next. `exit_code` is what the command
    returns: 1 failed, 2 bad parameters or usage, 3 waiting for approval, 4 a check refused.
    """

    exit_code = 1

    def __init__(self, what: str, remedy: str = ""):
        self.what = what.rstrip()
        self.remedy = remedy.strip()
        super().__init__(f"{self.what} {self.remedy}".strip())

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines in place of a traceback."""
        lines = [f"STOP ({type(self).__name__}): {self.what}"]
        return [*lines, f"Next: {self.remedy}"] if self.remedy else lines


class StageFailed(Refusal):
    """Work that was started did not end as it should."""

    exit_code = 1


class BadParams(Refusal):
    """A params file, an override or a command line that cannot be meant as written."""

    exit_code = 2


class NotApproved(Refusal):
    """The plan has no approval that is valid now."""

    exit_code = 3


class CheckRefused(Refusal):
    """Data, disk, GPUs or files are not in the state that the next action needs."""

    exit_code = 4


# A refusal that crosses a process (a notebook's kernel) is known by its name.
REFUSALS = {kind.__name__: kind for kind in (Refusal, StageFailed, BadParams, NotApproved, CheckRefused)}
