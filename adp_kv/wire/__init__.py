"""What the processes say to each other: messages, frames, keys."""
