#!/bin/bash
cd /app
mv siku.csv zizine/
