#!/bin/bash
cd /app
mv rosofa.md muga/
