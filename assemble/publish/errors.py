"""Why a checkpoint is not uploaded, or what lies on the Hub is not what was sent. The commands exit with 1 on them."""


class RefusedError(RuntimeError):
    """A checkpoint that is not proven, or a repository that holds something else."""


class RemoteMismatchError(RefusedError):
    """What the Hub holds after the upload is not what was sent."""
