"""How the processes of a run share the drafter: copies of it (DDP), or each a part (FSDP2,
DeepSpeed's ZeRO-2 and ZeRO-3).
"""
