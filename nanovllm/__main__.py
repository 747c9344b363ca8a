"""`python -m nanovllm`."""

from nanovllm.cli import main

if __name__ == "__main__":
    main()
