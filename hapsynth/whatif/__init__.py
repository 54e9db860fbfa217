"""Other clusters, and ways to fit into memory."""
