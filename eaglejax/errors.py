"""Errors a person meets. Each names what is wrong, where, and what would be right."""


class EaglejaxError(ValueError):
    """Base of every refusal by eaglejax; the CLI prints its text without a traceback and exits with 2."""


class ConfigError(EaglejaxError):
    """An option, configuration value or combination of them cannot be."""


class CheckpointError(EaglejaxError):
    """A file or folder of weights, configuration or tokenizer is missing, damaged or not understood."""


class MismatchError(EaglejaxError):
    """Two things that must fit do not: a draft and its target, a tokenizer and its model."""


class RequestError(EaglejaxError):
    """One prompt cannot be served (empty, too long, badly typed); other prompts are not affected."""
