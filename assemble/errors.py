"""The root of every error that is the input's fault: its text is for the user, and the commands exit with 2 on it."""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the commands say what to do about these


class InputError(ValueError):
    """Something the user gave cannot be used. The text names it and says what to do next."""
