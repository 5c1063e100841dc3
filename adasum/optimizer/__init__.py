"""The distributed optimizer and its two methods: reducing gradients, or reducing steps."""
