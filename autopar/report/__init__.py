"""What a plan says to a person (text) and to a program (JSON)."""
