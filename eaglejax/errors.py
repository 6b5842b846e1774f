"""Errors a person meets. Each names what is wrong, where, and what would be right, in one line."""

LONGEST = 500
"""Characters of a message. What a damaged file holds can be of any length."""


class EaglejaxError(ValueError):
    """Base of every refusal by eaglejax; the CLI prints its text without a traceback and exits with 2.

    The text is one line of at most ``longest`` characters: what cannot be printed is escaped, and of a longer
    one the middle is left out.
    """

    longest = LONGEST

    def __init__(self, message: str) -> None:
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        if len(shown) > self.longest:
            end = self.longest // 3
            shown = f"{shown[: self.longest - end - 5]} ... {shown[-end:]}"
        super().__init__(shown)


class ConfigError(EaglejaxError):
    """An option, configuration value or combination of them cannot be."""


class CheckpointError(EaglejaxError):
    """A file or folder of weights, configuration or tokenizer is missing, damaged or not understood."""


class MismatchError(EaglejaxError):
    """Two things that must fit do not: a draft and its target, a tokenizer and its model."""

    # It quotes the paths that a person gave, in a command to be copied whole, and nothing that a file holds.
    longest = 4 * LONGEST


class RequestError(EaglejaxError):
    """One prompt cannot be served (empty, too long, badly typed); other prompts are not affected."""
