"""When instructions run: tasks on compute streams and links, orders of them, and the time that these take."""
