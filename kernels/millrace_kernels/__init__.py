"""Attention and the small operators around it, for the CPU and CUDA: see `api`. Imports only
torch.
"""
