"""The public test kit: what an author of a store or an engine, in this tree or another, tests it with."""
