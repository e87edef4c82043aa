"""What can be wrong with a model or a prompt before any KV is computed.

ModelError
├── ModelNotFound        no such directory, and nothing of that name on this machine
├── UnverifiedWeights    the weights' content is unknown and no immutable revision was given
├── UnsupportedModel     its cache is none that this version can store (latents, recurrent state, …)
├── AdapterError         an adapter's files are missing or unreadable
├── AnswerFailed         the process that was to answer ended without an answer
├── EngineFailed         an engine's process cannot be started, or ended in the middle
├── NotAccepted          a probe found that one engine computes something else than another
├── ServerRefused        a server that is none, does not know the model, or does not let us in
├── ServerUnavailable    a server that does not answer, or not in time
└── GeometryMismatch     the running model's cache has another shape or type than its identity says
PromptError              a document or prompt file that cannot be read as one
"""

from __future__ import annotations


class ModelError(ValueError):
    """The root: one sentence that says what was found, what was expected and what to do next."""


class ModelNotFound(ModelError):
    pass


class UnverifiedWeights(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class AdapterError(ModelError):
    pass


class AnswerFailed(ModelError):
    pass


class EngineFailed(ModelError):
    pass


class NotAccepted(ModelError):
    pass


class ServerRefused(ModelError):
    pass


class ServerUnavailable(ModelError):
    pass


class GeometryMismatch(ModelError):
    pass


class PromptError(ValueError):
    """A document or prompt file that cannot be read as one; says the file, and the line where there are lines."""
