"""Deaths of ranks of a script that trains with torch's own process group."""
