"""What a training reads: its conversations with their loss masks, before it starts."""
