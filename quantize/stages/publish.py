"""publish: OUT goes to the Hub, and what lies there afterwards is compared with it."""

from assemble.errors import InputError
from assemble.publish.account import check_push
from assemble.publish.errors import RefusedError
from assemble.publish.proof import prove
from assemble.publish.upload import publish
from quantize.errors import CheckFailedError
from quantize.stage import Context, Request, Result


class PublishError(CheckFailedError):
    """OUT is complete, and was not published."""


def check(request: Request) -> list[str]:
    """Asks the Hub whether it will take the checkpoint, before any work."""
    if request.push is None:
        return []
    user = check_push(request.push)
    seen = "public" if request.push.public else "private"
    return [f"the checkpoint will be uploaded to {request.push.repo_id} as {user}; a new repository is {seen}"]


def run(context: Context) -> Result:
    """Uploads OUT.

    Raises:
        PublishError: it is not proven, the repository holds something else, or the Hub holds other bytes than were sent.
    """
    target, out = context.request.push, context.checkpoint
    assert target is not None  # noqa: S101 - the stage is run when it is asked for
    total = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    try:
        with context.reporter.task("check what is uploaded", total) as progress:
            proven = prove(out, target.repo_id, progress)
        done = publish(proven, target, context.reporter.line)
    except (RefusedError, InputError) as error:
        raise PublishError(f"{error} OUT {out} is complete.") from error
    return Result({name: parcel.sha256 for name, parcel in proven.files.items()}, done.as_json())
