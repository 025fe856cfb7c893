#!/bin/bash
cd /app
mv sipi/galo.csv nenamo.csv && ln -s pegeri.log voveda
