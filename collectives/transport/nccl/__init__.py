"""NCCL, called through cupy or through torch.distributed."""
