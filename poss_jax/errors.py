"""The one error that a person can cause."""


class InputError(ValueError):
    """Something that was given is wrong: a file, a flag, a config, a token id.

    The message is one line that names the thing and how to mend it. Command line programs print it and exit
    with status 2; anything else that is raised is a fault of ours and keeps its traceback.
    """
