"""Where the bytes of a page are: geometry without a tensor library."""
