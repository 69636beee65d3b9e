"""The errors a user can cause and mend; each message names the key, the value, what is allowed and what to change."""


class StochDPOError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(StochDPOError, ValueError):
    """A setting is wrong, contradicts another one, or needs something that is not installed."""


class DataError(StochDPOError, ValueError):
    """A preference row or file cannot become a training pair."""


class ModelError(StochDPOError, ValueError):
    """A model cannot be split into two lanes, or its weights and tokenizer do not fit each other."""


class LockstepError(StochDPOError, RuntimeError):
    """The ranks disagree about the step they are about to run."""


class ExportError(StochDPOError, RuntimeError):
    """Exported weights were read back and are not what was trained."""


class CheckpointError(StochDPOError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the run that would continue from it."""
