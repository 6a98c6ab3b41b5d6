"""What starts the engine of each choice of `server=`."""

from ..servers.base import Server
from .llamacpp import LlamaCppStarter
from .openvino import OpenVinoStarter
from .own import OwnStarter
from .sglang import SglangStarter
from .starter import EngineStarter
from .vllm import VllmStarter

STARTERS: dict[str, type[EngineStarter]] = {
    "llamacpp": LlamaCppStarter,
    "openvino": OpenVinoStarter,
    "sglang": SglangStarter,
    "spectrain": OwnStarter,
    "vllm": VllmStarter,
}


def find_starter(server: Server) -> EngineStarter:
    """Return what starts the engine of a server."""
    return STARTERS.get(server.name, EngineStarter)(server)
