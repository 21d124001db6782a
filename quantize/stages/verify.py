"""verify: the law book over the assembled checkpoint, values and identity with the source included."""

from pathlib import Path

from assemble.jsonfile import write_object
from assemble.verify import Report, verify
from assemble.writer import sha256_file
from quantize.errors import CheckFailedError
from quantize.stage import Context, Result
from quantize.stages import fetch

FILE = "verify.json"


class VerificationError(CheckFailedError):
    """A checkpoint that broke a rule. It is not released as OUT."""

    def __init__(self, report: Report, kept: Path) -> None:
        first = report.errors[0]
        super().__init__(
            f"verification failed with {len(report.errors)} errors; OUT was not made. "
            f"{first.rule}: {first.where}: found {first.found}, expected {first.expected}. All of them: {kept}"
        )


def run(context: Context) -> Result:
    """Applies every rule and keeps the report.

    Raises:
        VerificationError: an error was found.
    """
    source, head = fetch.opened(context.records["fetch"])
    root = context.directory_of("assemble")
    total = sum(path.stat().st_size for path in root.glob("*.safetensors"))
    with context.reporter.task("verify", total) as progress:
        report = verify(root, source=source, head=head, deep=True, require_mtp=True, progress=progress)
    write_object(context.directory / FILE, report.as_json())
    if report.errors:
        raise VerificationError(report, context.directory / FILE)
    facts = {"rules": len(report.rules), "warnings": [f"{f.rule}: {f.where}: {f.found}" for f in report.warnings]}
    return Result({FILE: sha256_file(context.directory / FILE)}, facts)
