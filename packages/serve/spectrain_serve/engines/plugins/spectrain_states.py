"""Writes the hidden states of vLLM's method extract_hidden_states to files, on a GPU and on a CPU.

vLLM imports this module in its own environment, by kv_connector_module_path; spectrain need not be
installed there. A file appears under its name once it is complete, and its metadata names its
layers and the model.
"""

import os
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class FinishedCopy:
    """Stands for the CUDA event of a copy that is over when its call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class StatesConnector(ExampleHiddenStatesConnector):
    """vLLM's connector for hidden states, which without CUDA copies in the call itself.

    As shipped (0.32), its copy needs pinned memory and CUDA events, and fails at the first request
    on a CPU.
    """

    @property
    def layer_ids(self) -> list[int]:
        draft_config = self._vllm_config.speculative_config.draft_model_config.hf_config
        return list(draft_config.eagle_aux_hidden_state_layer_ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the cache; refuse layers that vLLM would return in another order or number than
        they were given.
        """
        ids = self.layer_ids
        num_layers = self._vllm_config.model_config.get_total_num_hidden_layers()
        if ids != sorted({*ids}) or not all(0 <= layer <= num_layers for layer in ids):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids={ids}: use ascending layers from 0 to "
                f"{num_layers}, each once"
            )
        super().register_kv_caches(kv_caches)

    def _submit_async_write(self, pending: Any) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        positions = torch.arange(len(pending.token_ids))
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[positions // self._block_size]
        # Indexing copies, so the blocks may be used again after this call. [T, L, D]
        states = self._kv_cache[blocks, :, positions % self._block_size]
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        # The lock is held since the request arrived.
        lock = self._lock_fds.pop(pending.req_id, None)
        copy = FinishedCopy()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        future = self._executor.submit(self._write_tensors, tensors, copy, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copy
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(
        self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        """Write a file in a thread, and release its lock. The class above calls it through the
        instance too.
        """
        partial_name = f"{filename}.partial"
        try:
            event.synchronize()
            metadata = {
                "layers": ",".join(map(str, self.layer_ids)),
                "model": str(self._vllm_config.model_config.model),
            }
            save_file(tensors, partial_name, metadata=metadata)
            os.replace(partial_name, filename)
        except BaseException:
            # A full disk leaves nothing behind.
            if os.path.exists(partial_name):
                os.remove(partial_name)
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
