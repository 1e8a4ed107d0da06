"""Who is alive, and how bytes travel between members."""
