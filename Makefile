# Every target sets up what it needs in .venv by itself; the logic is in tools/*.py.
# Only relative paths here, so that a folder with spaces or accents works.
# Another interpreter for the set-up: make PYTHON=python3.12 book

PYTHON ?= python3
VENV := .venv/bin/python

.PHONY: help book test notebooks serve lab lint lock bench audit clean environment

help:
	@echo "make book               build the book: _build/html/index.html"
	@echo "make test               lint, build, and run every test and every chapter"
	@echo "make notebooks [CH=02]  re-execute the chapters and rewrite their .ipynb twins"
	@echo "make serve              serve the built book on this machine"
	@echo "make lab                open the book in JupyterLab"
	@echo "make lint               check the style of the code, chapters included"
	@echo "make lock               renew constraints.txt"
	@echo "make bench              time the package against what one would use instead"
	@echo "make audit              the checks too long for make test"
	@echo "make clean              remove what was built (.venv stays)"

environment:
	@$(PYTHON) tools/environment.py

book: environment
	@$(VENV) tools/build.py

test: environment
	@$(VENV) tools/suite.py

notebooks: environment
	@$(VENV) tools/twins.py write $(CH)

serve: book
	@$(VENV) -m http.server --bind 127.0.0.1 --directory _build/html

lab: environment
	@$(VENV) -m jupyterlab book

lint: environment
	@$(VENV) tools/lint.py

lock:
	@$(PYTHON) tools/lock.py

bench: environment
	@cd benchmarks && ../$(VENV) -m pytest -q --benchmark-json=../_bench.json

audit: environment
	@MEASUREATTN_KILLS=10 $(VENV) -m pytest -q tests -k kill -p no:benchmark

clean:
	rm -rf _build build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
