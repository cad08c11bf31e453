"""Worker of a rank: the thread beside the user's loop that exchanges gradients with the other ranks."""
