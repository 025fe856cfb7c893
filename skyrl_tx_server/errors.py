"""Every error the server raises on purpose. Each carries its HTTP status and the Tinker failure category.

ServerError                 500 server
|-- UserError (ValueError)  400 user     what the caller sent cannot be honoured; the message names the fix
|   |-- NotFoundError       404 user     no such session, model, sampler or checkpoint
|   |-- NoRouteError        404 user     no such method and path
|   |-- UnauthorizedError   401 user     the API key is missing or wrong
|   |-- ForbiddenError      403 user     the API key does not allow this, or a web page or a foreign host name asks
|   |-- UnsupportedMediaTypeError 415 user  the body's content-type is not one that the route reads
|   |-- TooLongError        400 user     prompt and completion do not fit into the context
|   `-- ConflictError       409 user     the name is taken
|-- CapacityError           429 server   out of slots or memory right now
|-- LoadingError            503 server   the model is not loaded yet
|-- FutureLostError         410 server   the request was lost in a restart
|-- SamplerError            500 server   the external sampler is not there, or answers what was not asked for
|   `-- AdapterLostError    500 server   it has no such adapter any more
`-- ConfigError (ValueError)             bad start-up option or model directory; printed as one line, exit
status 2
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
    status = 409


class CapacityError(ServerError):
    status = 429


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
