"""NCCL, through cupy or through torch.distributed."""
