"""This package lets the ranks of a job compare facts and leave notes, and records which steps consumed what."""
