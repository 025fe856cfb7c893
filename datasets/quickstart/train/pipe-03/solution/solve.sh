#!/bin/bash
cd /app
sort getama.md | tail -n 5 > nuvi.dat
