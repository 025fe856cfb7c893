"""The errors that the server raises, with their HTTP status and Tinker's error category.

ServerError                 500 server
|-- UserError (ValueError)  400 user     the request cannot be served; the message says what to do
|   |-- NotFoundError       404 user     no such session, model, sampler, checkpoint, run or download
|   |-- NoRouteError        404 user     no such method and path
|   |-- UnauthorizedError   401 user     the API key is missing or wrong
|   |-- ForbiddenError      403 user     the route is for the operator's API key only, or the Origin,
|   |                                    Sec-Fetch-Site or Host header is not allowed
|   |-- UnsupportedMediaTypeError 415 user  the route does not accept the body's content-type
|   |-- TooLongError        400 user     prompt and completion do not fit into the context (OpenAI's routes)
|   `-- ConflictError       400 user     the name is already in use; not 409, because the SDK would retry
|-- CapacityError           429 server   slots, memory or a quota are used up for now; the client may retry
|-- StorageError            400 server   checkpoints_dir cannot be written, for example because the disk is
|                                        full; not 5xx, because the SDK would retry for minutes
|-- LoadingError            503 server   the model is not loaded yet
|-- FutureLostError         410 server   no future has this request id, or a heartbeat names no open session
|-- SamplerError            500 server   the external sampler cannot be reached, refuses a request, or sent a
|   |                                    reply that this server cannot use
|   `-- AdapterLostError    500 server   the external sampler has lost an adapter
`-- ConfigError (ValueError)             invalid option or model directory; the server prints one line
                                        and exits with status 2

Other subclasses of `ServerError` are defined in the module to which they belong, for example
`engine.engine.WithdrawnError`.
"""


class ServerError(Exception):
    status: int = 500
    category: str = "server"


class UserError(ServerError, ValueError):
    status = 400
    category = "user"


class NotFoundError(UserError):
    status = 404


class NoRouteError(UserError):
    status = 404


class UnauthorizedError(UserError):
    status = 401


class ForbiddenError(UserError):
    status = 403


class UnsupportedMediaTypeError(UserError):
    status = 415


class TooLongError(UserError):
    pass


class ConflictError(UserError):
    pass


class CapacityError(ServerError):
    status = 429


class StorageError(ServerError):
    status = 400


class LoadingError(ServerError):
    status = 503


class FutureLostError(ServerError):
    status = 410


class SamplerError(ServerError):
    pass


class AdapterLostError(SamplerError):
    pass


class ConfigError(ServerError, ValueError):
    pass
