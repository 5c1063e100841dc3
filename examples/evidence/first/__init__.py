"""The trainings behind the tables of docs/evidence/README.md, of before the protocol."""
