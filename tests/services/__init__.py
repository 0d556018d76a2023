"""How tests start the real stores: the embedded Valkey and the Redis of Debian, from plain files.

`StoreServer` starts, kills and restarts one server on a Unix socket in a folder of the caller, with the
persistence settings that qim demands of every instance. A service that is not installed skips the test with
its reason on a developer's machine and fails it under `CI=true`: a green run there must mean that everything
really ran.
"""

from tests.services.store_server import (
    StoreServer,
    find_redis,
    find_valkey,
    require_service,
)

__all__ = ["StoreServer", "find_redis", "find_valkey", "require_service"]
