"""Clients that people use, each in an environment of its own, against one pool with real vLLM.

A script is started as `<script> URL MODEL`. It asks for a stream, a stream with its usage, a tool
call and a model that there isn't, leaves a stream in the middle, writes what it got as one line of
JSON (see `scripts/asked.py`) and stays until its standard input is closed: what it left must end
although the program lives on.
"""
