"""The implementation of the commands of `pier-node`, one file per command; cli.py defines their options."""
