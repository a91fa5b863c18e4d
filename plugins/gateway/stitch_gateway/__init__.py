"""The gateway: one address in front of every replica. ``docs/http.md`` has its HTTP contract."""

from .app import Gateway, GatewaySettings, open_gateway, run_gateway
from .pools import StaticPool, StorePool

__all__ = ["Gateway", "GatewaySettings", "StaticPool", "StorePool", "open_gateway", "run_gateway"]
