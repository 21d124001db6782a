"""The law book: what vLLM requires of a checkpoint of this family, one small function a rule, all in `assemble.rules.book`.

Ids are stable. IDX speaks of files and index, CFG of the config files, Q of quantized and other modules, IGN of `ignore`,
MTP of the head, VAL of values, VER of versions. A number with a `b` is the half of a rule that needs more reading.
"""

from assemble.rules.model import Detail, Finding, Mend, Needs, Rule, Served, Severity
from assemble.rules.subject import Subject

__all__ = ["Detail", "Finding", "Mend", "Needs", "Rule", "Served", "Severity", "Subject"]
