"""Where on the Hub a checkpoint goes, and how."""

from dataclasses import dataclass

from assemble.errors import InputError
from assemble.hub import HUB_ID


class TargetError(InputError):
    """A target that cannot be: a name that is none, or choices that exclude each other."""


@dataclass(frozen=True)
class PushTarget:
    """A place on the Hub.

    Attributes:
        repo_id: `user/name` or `org/name` of a model repository. It is made when it is not there.
        revision: A branch; it is made when it is not there.
        public: Make a new repository public. One that is there keeps its visibility.
        pull_request: Open a pull request on `revision` in place of committing to it.
        replace: Replace what else lies in the repository.
    """

    repo_id: str
    revision: str = "main"
    public: bool = False
    pull_request: bool = False
    replace: bool = False

    def __post_init__(self) -> None:
        if not HUB_ID.fullmatch(self.repo_id):
            raise TargetError(f"{self.repo_id!r} is no name of a repository. Give it as user/name.")
        if self.pull_request and self.revision != "main":
            raise TargetError("the Hub opens pull requests on main only. Leave out the branch, or the pull request.")
