#!/bin/bash
cd /app
sort saga.md > solu.log
