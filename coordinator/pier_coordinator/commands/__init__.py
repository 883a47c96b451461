"""The implementation of the commands of pier-coordinator; cli.py defines their command lines."""
