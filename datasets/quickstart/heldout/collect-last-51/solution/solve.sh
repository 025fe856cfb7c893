#!/bin/bash
cd /app
tail -n 15 midogi.md >> sosa_tami.log
