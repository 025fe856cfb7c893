#!/bin/bash
cd /app
mv gugige.md rele/
