"""A draft model that learns to ask the target for tokens (knowledge distillation with training
wheels).
"""
