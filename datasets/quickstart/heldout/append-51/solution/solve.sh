#!/bin/bash
cd /app
echo natedi >> lelu.md
