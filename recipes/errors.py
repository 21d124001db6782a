"""The one error of this package."""


class RecipeError(ValueError):
    """A recipe or serve profile that cannot be found, read or understood."""
